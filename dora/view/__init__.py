"""What people see: tables, the live view and its narration. The command line and the demo draw with it.

It reads reports of the simulator, answers of a service and decisions of a replay; it opens no connection and no file.
"""
