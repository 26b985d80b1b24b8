"""The encoder service: media in, entries out. It knows pixels and never sees a prompt."""
