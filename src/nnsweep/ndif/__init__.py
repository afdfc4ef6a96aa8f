"""NDIF: submitting sessions to a server, and a local server to submit them to."""
