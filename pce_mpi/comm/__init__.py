"""Everything that talks to other ranks: private communicators, collectives, agreement, the trace."""
