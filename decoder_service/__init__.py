"""The decoder service: a timeline in, tokens out. It knows text and entries and never sees a pixel."""
