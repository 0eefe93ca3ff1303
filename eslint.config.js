// Rules for the page's code: what ESLint recommends, in a browser.

import js from "@eslint/js";
import globals from "globals";

export default [
  js.configs.recommended,
  { languageOptions: { globals: globals.browser }, linterOptions: { reportUnusedDisableDirectives: "error" } },
  { files: ["tests/page/**"], languageOptions: { globals: globals.node } },
];
