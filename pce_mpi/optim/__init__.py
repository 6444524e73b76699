"""What steps parameters: SGD, and the synchronization of partial gradients before it."""
