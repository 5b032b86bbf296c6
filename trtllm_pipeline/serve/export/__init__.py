"""Exports a verified cell as files that serve it elsewhere: `pipeline export`."""
