"""The operator's tools: commands, tables, the web page, the demo, checks of a machine and of a record."""
