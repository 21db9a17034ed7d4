"""Workers, pools, hosting and loads: data of the fleet, and its partition among versions."""
