// Reads a list of objects from stdin and prints, for each, what the schema of its custom resource has against it.

import { pathToFileURL } from "node:url";
import { text } from "node:stream/consumers";


const PACKAGES = {
  "monitoring.coreos.com/v1": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1",
  "keda.sh/v1alpha1": "@kubernetes-models/keda/keda.sh/v1alpha1",
};

async function load(name) {
  const [scope, bare, ...rest] = name.split("/");
  return import(pathToFileURL(`${process.env.NODE_MODULES}/${[scope, bare, ...rest].join("/")}/index.js`));
}

const findings = [];
for (const each of JSON.parse(await text(process.stdin))) {
  const models = await load(PACKAGES[each.apiVersion]);
  const Model = models[each.kind] ?? models.default?.[each.kind];
  try {
    new Model(each).validate();
    findings.push(null);
  } catch (error) {
    findings.push(String(error.message));
  }
}
console.log(JSON.stringify(findings));
