"""What runs a decoder: one folder for each backend."""
