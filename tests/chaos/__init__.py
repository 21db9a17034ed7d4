"""Everything is killed, stopped, cut off and filled up while it runs; then every promise is checked."""
