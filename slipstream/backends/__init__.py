"""Backends run decoders and draft heads. Each backend has a folder here and a name in
`slipstream.settings.BACKENDS`."""
