"""One readable file per task."""
