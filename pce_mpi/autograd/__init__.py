"""The tape, and how any operation runs on distributed arrays."""
