"""What every wing reads: errors, bounded readers, locks, number formats, engine traits, run facts, library versions, tables, pages, progress."""
