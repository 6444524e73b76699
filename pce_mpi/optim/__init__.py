"""SGD, and the synchronization of Partial gradients before its step."""
