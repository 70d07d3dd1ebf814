// A sidecar with a reward, from the protos alone. See docs/plugins.md.
const path = require('node:path');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const root = path.join(__dirname, '..', '..', '..');
const definition = loader.loadSync('rollout/plugin/v1/plugin.proto', {
  includeDirs: [path.join(root, 'proto'), path.join(root, '.tools', 'protovalidate')], // of `make generate`
  enums: String,
  defaults: true,
});
const { plugin } = grpc.loadPackageDefinition(definition).rollout;

// digits is the share of digits in a completion.
function digits(sample) {
  const found = (sample.completion.match(/[0-9]/g) ?? []).length;
  return { reward: found / Math.max(1, [...sample.completion].length), metrics: { digits: found } };
}

// refused is an error with a reason, as google.rpc.Status would have it for the worker.
function refused(code, message) {
  return Object.assign(new Error(message), { code, details: message });
}

const server = new grpc.Server();
server.addService(plugin.v1.PluginService.service, {
  handshake(call, answer) {
    if (call.request.schemaVersion !== 1) return answer(refused(grpc.status.FAILED_PRECONDITION, 'this plugin has version 1'));
    answer(null, { schemaVersion: 1, plugins: [{ kind: 'PLUGIN_KIND_REWARD', name: 'digits', version: '1.0.0' }] });
  },
  reward(call, answer) {
    answer(null, { scores: call.request.groups.flatMap((group) => group.samples.map(digits)) });
  },
});

// grpc.health.v1.Health has one method that workers call: its request names the service, and 1 is SERVING.
const health = {
  check: {
    path: '/grpc.health.v1.Health/Check', requestStream: false, responseStream: false,
    requestDeserialize: (bytes) => bytes, responseSerialize: (status) => Buffer.from([0x08, status]),
  },
};
server.addService(health, { check: (_, answer) => answer(null, 1) });

server.bindAsync(process.env.ROLLOUT_PLUGIN_ADDRESS, grpc.ServerCredentials.createInsecure(), (error) => {
  if (error) throw error;
});
process.stdin.resume().on('end', () => process.exit(0)); // the worker has ended
