"""Data and state transitions shared by every room. Imports nothing of triptych but itself."""
