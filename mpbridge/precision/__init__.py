"""What an author writes, what it means, and the names under which it is known. Knows no framework."""
