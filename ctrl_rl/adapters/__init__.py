"""Other libraries' learners on our environments, and their policies in our tools."""
