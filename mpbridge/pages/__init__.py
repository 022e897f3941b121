"""Pages: one HTML file with charts, tables and a glossary, which loads nothing from anywhere. Values in, a file out; loads no framework.

The charts are uPlot's (version 1.6.32, MIT, vendor/LICENSE.uPlot), inlined.
"""
