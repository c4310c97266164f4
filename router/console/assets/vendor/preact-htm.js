// What the console uses of preact and htm: components in templates, without a build step.

import htm from "./htm.js";
import { h } from "./preact.js";

export { render } from "./preact.js";
export { useEffect, useMemo, useReducer, useRef, useState } from "./preact-hooks.js";

export const html = htm.bind(h);
