"""What a reader of the book may skip: each folder is a room of its own."""
