"""Tuning: find the settings that a caller did not give, and run the chains with them."""
