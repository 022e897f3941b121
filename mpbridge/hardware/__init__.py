"""What a machine is and can do: its table, the one probe of this one, library versions, and which policy runs where. Loads no framework."""
