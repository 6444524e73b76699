"""Communication with other ranks: private communicators, collectives, agreement, the trace."""
