"""What machines are and can do: the table of machines, the probe of the local one, library versions, and which policy runs where. Loads no framework."""
