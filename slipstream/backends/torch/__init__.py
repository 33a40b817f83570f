"""The torch backend: the reference in float64, CUDA, and whatever the native backend refuses."""
