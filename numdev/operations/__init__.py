"""Operations: what is audited. Each holds what only it knows: its calls, its exact
result, its roundings, its mistakes, and what is said of its rows."""
