"""Files with which a verified cell is served elsewhere: `pipeline export`."""
