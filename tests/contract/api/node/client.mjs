// A client that shares nothing with the server but the proto: `node client.mjs TARGET PROTO_DIR SCENARIO`.
// Prints one JSON object. Packages are found through NODE_PATH-like resolution from NODE_MODULES.
import { createRequire } from "node:module";
import path from "node:path";

const [target, protoDir, scenario] = process.argv.slice(2);
const require = createRequire(path.join(process.env.NODE_MODULES, "anchor.js"));
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const definition = loader.loadSync("slipstream/v1/inference.proto", {
  includeDirs: [protoDir],
  keepCase: true,
  longs: String,
  enums: String,
  oneofs: true,
  defaults: true,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).slipstream.v1;
// The published policy, where the scenario has one.
const policy = process.env.SERVICE_CONFIG ? { "grpc.service_config": process.env.SERVICE_CONFIG } : {};
const client = new InferenceService(target, grpc.credentials.createInsecure(), policy);

const seen = { ids: [], texts: [], kinds: [], positions: [] };

function finish(result) {
  process.stdout.write(JSON.stringify({ ...seen, ...result }));
  client.close();
}

function embed() {
  const inputs = [{ text: "hello" }, { token_ids: { ids: [5, 6] } }];
  client.Embed({ inputs, pooling: "POOLING_MEAN", normalize: false }, (error, response) =>
    finish(error ? { code: error.code } : { code: grpc.status.OK, response }),
  );
}

function stream() {
  const options = scenario === "deadline" ? { deadline: Date.now() + 300 } : {};
  const call = client.Generate(
    { text: "hello from node", sampling_params: { max_tokens: 5, temperature: 0 }, request_id: `node-${scenario}` },
    options,
  );
  call.on("data", (response) => {
    seen.kinds.push(response.event);
    if (response.event === "delta") {
      seen.ids.push(...response.delta.token_ids);
      seen.texts.push(response.delta.text);
      seen.positions.push(response.delta.position);
      if (scenario === "cancel") call.cancel();
    }
    if (response.event === "finished") seen.finished = response.finished;
  });
  call.on("error", (error) => finish({ code: error.code }));
  call.on("end", () => seen.finished && finish({ code: grpc.status.OK }));
}

if (scenario === "embed") embed();
else stream();
