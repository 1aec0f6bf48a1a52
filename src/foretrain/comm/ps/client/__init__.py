"""Worker's end of the parameter server: connections, bytes in flight, and pushes to resend after a loss."""
