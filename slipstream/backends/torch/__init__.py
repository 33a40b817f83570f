"""The torch backend: the float64 reference, CUDA, and every model that the native backend does not support."""
