"""Makes the recording at the top of README: one measured run, drawn as an animated SVG."""
