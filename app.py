"""The dashboard: `streamlit run app.py`."""

import streamlit as st

st.set_page_config(page_title="psm_core", page_icon="🗜️", layout="wide")
st.navigation(
    [
        st.Page("pages/model.py", title="Model", icon=":material/account_tree:", default=True),
        st.Page("pages/factorize.py", title="Factorize", icon=":material/compress:"),
        st.Page("pages/compare.py", title="Compare", icon=":material/scatter_plot:"),
        st.Page("pages/export.py", title="Export", icon=":material/download:"),
    ]
).run()
