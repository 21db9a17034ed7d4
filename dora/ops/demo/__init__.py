"""The demo: a service and the reference trainer in one terminal, watched live and audited at the end."""
