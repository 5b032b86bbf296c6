"""Servers that outlive the command that started them: started, found again, shown, stopped."""
