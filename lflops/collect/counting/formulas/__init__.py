"""What an operator costs, as pure functions of shapes; a file for each family of operators, and the table of all of them."""
