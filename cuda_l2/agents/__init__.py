"""Coding agents over the Model Context Protocol: what they may do, and the server. Its limits stand here."""

MAX_MESSAGE_BYTES = 4 << 20
"""Limit of one message, over standard input or HTTP."""
MOST_SOURCES = 8
"""Sources of one submission."""
MOST_EXEMPLARS = 8
MOST_WAITING = 8
"""Calls that wait for their turn; more are refused."""
MOST_CONNECTIONS, MOST_SESSIONS = 32, 8
"""Over HTTP."""
WORDS_CHARS = 400
"""Limit of a query about headers."""
