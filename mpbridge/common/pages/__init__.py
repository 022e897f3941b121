"""Pages: one HTML file with charts, tables and a glossary, which loads no other files. Takes values, returns the text of a file; loads no framework.

The charts are uPlot's (version 1.6.32, MIT, vendor/LICENSE.uPlot), inlined."""
