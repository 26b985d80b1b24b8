"""One module per question; each measures a ratio between two things in the same run and prints it as one JSON line."""
