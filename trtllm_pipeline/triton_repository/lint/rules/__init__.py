"""The rules, one module for each hundred of ids. A new rule is a decorated function in one of them, no more."""
