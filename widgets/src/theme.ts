// The page's colours as Plotly needs them, and word of every change of theme.

export interface Theme {
  text: string;
  muted: string;
  grid: string;
  surface: string;
  danger: string;
  font: string;
}

/** Reads the colours that panel.css resolved for `element`: JupyterLab's, VS Code's, or its own. */
export function themeOf(element: Element): Theme {
  const style = getComputedStyle(element);
  const read = (name: string, otherwise: string) => style.getPropertyValue(name).trim() || otherwise;
  return {
    text: read("--nbgpu-text", "#222"),
    muted: read("--nbgpu-muted", "#666"),
    grid: read("--nbgpu-grid", "rgba(128,128,128,0.2)"),
    surface: read("--nbgpu-surface", "#fff"),
    danger: read("--nbgpu-danger", "#c62828"),
    font: style.fontFamily || "sans-serif",
  };
}

/** Calls back after each change of theme; returns what ends that. */
export function onThemeChange(callback: () => void): () => void {
  const observer = new MutationObserver(() => {
    callback();
    // JupyterLab names the theme before its style sheet has arrived.
    setTimeout(callback, 600);
  });
  const attributes = ["data-jp-theme-name", "data-jp-theme-light", "data-vscode-theme-kind", "class"];
  observer.observe(document.body, { attributes: true, attributeFilter: attributes });
  const media = window.matchMedia?.("(prefers-color-scheme: dark)");
  media?.addEventListener("change", callback);
  return () => {
    observer.disconnect();
    media?.removeEventListener("change", callback);
  };
}
