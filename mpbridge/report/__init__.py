"""What people and programs read: tables, the progress line, metric files."""
