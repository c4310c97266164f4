// What all programs in this folder share: the cluster's address, and how results are printed.
export const url = process.env.BASE_URL;
export const model = process.env.MODEL;
export const question = "What is the weather in Paris?";
export const messages = [{ role: "user", content: question }];

// Run all cases and print one JSON object: each case's result, or its error.
export async function run(cases) {
  const results = {};
  for (const [name, runCase] of Object.entries(cases)) {
    try {
      results[name] = { result: await runCase() };
    } catch (error) {
      results[name] = { error: `${error.stack}\n${error.responseBody ?? ""}` };
    }
  }
  console.log(JSON.stringify(results));
}
