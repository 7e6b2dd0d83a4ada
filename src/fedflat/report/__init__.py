"""Output for people: progress, tables, figures and the HTML report."""
