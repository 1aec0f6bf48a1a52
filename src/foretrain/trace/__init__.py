"""What happened, in columns: spans of computation and communication, and what they say together."""

from foretrain.trace.spans import Kind, Span, Timeline

__all__ = ["Kind", "Span", "Timeline"]
