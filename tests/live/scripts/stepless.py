"""Never steps, and says nothing."""
