"""One table as a value, its forms as text, HTML, Markdown and rich, the wrapping of prose, and the units of bytes. Loads no framework."""
