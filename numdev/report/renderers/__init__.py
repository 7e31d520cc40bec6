"""Terminal, HTML, Markdown, JUnit and GitHub."""
