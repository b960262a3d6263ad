"""What the documents show, works."""

import re


def test_the_readmes_code_runs(python, root):
    blocks = re.findall(r"^```python\n(.*?)^```", (root / "README.md").read_text(), re.M | re.S)
    assert len(blocks) == 2
    output = python("-W", "error", "-c", "".join(blocks)).stdout
    assert "torch.Size([32, 64])" in output
    assert "share of time" in output


def test_links_between_documents_lead_somewhere(root):
    documents = [*root.glob("*.md"), *root.glob("*/*.md"), *root.glob("docs/*/*.md")]
    broken = [
        f"{document.relative_to(root)}: {link}"
        for document in documents
        if ".venv" not in document.parts and "build" not in document.parts
        for link in re.findall(r"\]\(([^)#:]+)\)", document.read_text())
        if not (document.parent / link).exists()
    ]
    assert broken == []
