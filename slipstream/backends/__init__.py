"""What runs a decoder and its draft heads: one folder for each backend, and one line in `table.BACKENDS`."""
