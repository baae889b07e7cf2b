"""The one place where protocol meets transport."""
