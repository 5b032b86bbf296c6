"""What an artifact was made from, by whom and where, as a statement that can be signed and checked."""
