"""Published numbers of tables 1 and 3 and of figure 6, from `pacs_trl/report/paper.yaml`."""

from pacs_trl.report.paper import PAPER


OUT_OF_DOMAIN_SOURCE = "arXiv 2509.02522v2, figure 6"

# method or model -> benchmark -> number, documented in the file
TABLE_1, TABLE_1_CITED, TABLE_1_GAINS = (PAPER[name] for name in ("table_1", "table_1_cited", "table_1_gains"))
TABLE_1_BENCHMARKS = tuple(name for name in TABLE_1["PACS-4B"] if name != "average")
OUT_OF_DOMAIN = PAPER["out_of_domain"]
OUT_OF_DOMAIN_IN_TEXT = {
    (method, name): value for method, row in PAPER["out_of_domain_in_text"].items() for name, value in row.items()
}
TABLE_3_DIVERSITY = {
    (model, method): row for model, rows in PAPER["table_3_diversity"].items() for method, row in rows.items()
}
